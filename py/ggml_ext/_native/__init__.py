"""What is compiled: the libraries and programs of llama.cpp, and how they are run."""

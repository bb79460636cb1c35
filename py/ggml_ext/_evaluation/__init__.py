"""How good and how fast a file is: llama-perplexity and llama-bench, run and read."""

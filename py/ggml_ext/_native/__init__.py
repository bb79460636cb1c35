"""Native code: llama.cpp's libraries through ctypes, and its programs."""

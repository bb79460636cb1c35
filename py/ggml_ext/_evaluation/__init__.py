"""Quality and speed of a file: runs of llama-perplexity and llama-bench, and their logs."""

"""Write output files, and verify them."""

"""One weight type of each kind of kernel: tests of code that types share run these by day, and all types by night."""

# one scale, pairs from a codebook, a codebook in the block, trellis in blocks of 256 and of 64, two weights per symbol
TYPE_KINDS = ("itq3_s", "ccq2", "ditto3", "itq3_t", "itq2_t64", "itq1h_t")

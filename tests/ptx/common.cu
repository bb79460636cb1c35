// The parts of upstream that products of every type share, and the entry points.
#include "quantize.cu"
#include "mmid.cu"
#include "mmq.cu"

#include "host.cu"

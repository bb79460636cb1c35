// What products of every type need of upstream, and their entry points.
#include "quantize.cu"
#include "mmid.cu"
#include "mmq.cu"

#include "host.cu"

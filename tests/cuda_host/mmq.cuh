// Replaces upstream's mmq.cuh.
#pragma once

#include "common.cuh"

// What the inner searches of variants.py share. Weights of the squared error are importances, or for rotated weights a matrix; NULL
// where all count alike.
#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HALF_MAX 65504.0f

static inline float half(float x) {
    return (float) (_Float16) (x > HALF_MAX ? HALF_MAX : x < -HALF_MAX ? -HALF_MAX : x);
}

struct sums {
    float xq, qq; // sums of importance*x*q and importance*q*q
};

static inline float gain(struct sums f, float s) { // how far a scale lowers the error
    return s*(2*f.xq - s*f.qq);
}

// One-dimensional k-means with eight clusters over sorted samples. A cluster is a range of samples, so prefix sums describe it. Sums and
// comparisons are float64 in one order, which numpy repeats exactly.
#pragma once

#include "encode.h"

enum { EXT_K = 8 };

// n samples in ascending order: values x[j], prefix sums of importance and of importance*value.
struct ext_samples {
    int            n;
    const double * x;
    const double * sum_w;   // n + 1
    const double * sum_wx;  // n + 1
};

// Ignore importances that are not positive and finite: callers other than the quantizer may pass anything.
static inline double ext_importance(float w) {
    return w > 0 && w <= FLT_MAX ? (double) w : 0;
}

// Return the first index whose value is not below the limit.
static inline int ext_lower_bound(const double * values, int n, double limit) {
    int lo = 0, hi = n;
    while (lo < hi) {
        const int mid = lo + (hi - lo)/2;
        if (values[mid] < limit) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

// Set centroids to the means of bound[k]..bound[k + 1]-1. A range without importance keeps its centroid.
static inline void ext_update_centroids(const struct ext_samples * s, const int bound[EXT_K + 1], double c[EXT_K]) {
    for (int k = 0; k < EXT_K; ++k) {
        const double w = s->sum_w[bound[k + 1]] - s->sum_w[bound[k]];
        if (w > 0) {
            c[k] = (s->sum_wx[bound[k + 1]] - s->sum_wx[bound[k]])/w;
        }
    }
}

static inline void ext_first_samples(const struct ext_samples * s, const int bound[EXT_K + 1], double c[EXT_K]) {
    for (int k = 0; k < EXT_K; ++k) {
        c[k] = s->x[bound[k] < s->n ? bound[k] : s->n - 1];
    }
}

// Ditto, pseudocode 1: clusters of equal population (lines 1-2; here of equal importance), then reassign and update (lines 4-9) until no
// sample changes its cluster.
static inline void ext_cluster_lloyd(const struct ext_samples * s, int n_steps, double c[EXT_K]) {
    int bound[EXT_K + 1] = {0};
    bound[EXT_K] = s->n;
    for (int k = 1; k < EXT_K; ++k) {
        bound[k] = ext_lower_bound(s->sum_w, s->n, s->sum_w[s->n]*k/EXT_K);
    }
    ext_first_samples(s, bound, c);
    for (int step = 0; step <= n_steps; ++step) {
        ext_update_centroids(s, bound, c);
        bool changed = false;
        for (int k = 1; k < EXT_K; ++k) {
            const int b = ext_lower_bound(s->x, s->n, 0.5*(c[k - 1] + c[k]));
            changed |= b != bound[k];
            bound[k] = b;
        }
        if (!changed) {
            break;
        }
    }
    for (int i = 1; i < EXT_K; ++i) { // empty clusters may be out of order
        for (int k = i; k > 0 && c[k - 1] > c[k]; --k) {
            const double t = c[k];
            c[k] = c[k - 1];
            c[k - 1] = t;
        }
    }
}

// Add a cluster by dynamic programming. The squared error of a cluster is its energy less sum_wx^2/sum_w, so maximize the sum of these.
// best[i]: that sum for samples 0..i-1; start[i]: where their last cluster begins. start ascends with i: searching the middle of a range
// first halves the search of the others.
static inline void ext_search_starts(const struct ext_samples * s, const double * below, double * best, uint16_t * start,
                                     int lo, int hi, int first, int last) {
    if (lo > hi) {
        return;
    }
    const int i = (lo + hi)/2, end = last < i ? last : i;
    double top = -1;
    for (int j = first; j <= end; ++j) {
        const double w = s->sum_w[i] - s->sum_w[j], wx = s->sum_wx[i] - s->sum_wx[j];
        const double gain = below[j] + wx*wx/(w > 0 ? w : 1);
        if (gain > top) {
            top      = gain;
            start[i] = (uint16_t) j;
        }
    }
    best[i] = top;
    ext_search_starts(s, below, best, start, lo, i - 1, first, start[i]);
    ext_search_starts(s, below, best, start, i + 1, hi, start[i], last);
}

// Cluster a block optimally: in 256 weights the paper's loop ends in local minima with 1.1 to 1.4 times the squared error.
static inline void ext_cluster_optimal(const struct ext_samples * s, double c[EXT_K]) {
    double   best[2][QK_K + 1];
    uint16_t start[EXT_K][QK_K + 1] = {{0}};
    assert(s->n <= QK_K);
    ext_search_starts(s, (const double[1]) {0}, best[0], start[0], 0, s->n, 0, 0);
    for (int k = 1; k < EXT_K; ++k) {
        ext_search_starts(s, best[(k - 1)%2], best[k%2], start[k], k < EXT_K - 1 ? 0 : s->n, s->n, 0, s->n);
    }
    int bound[EXT_K + 1] = {0};
    bound[EXT_K] = s->n;
    for (int k = EXT_K - 1; k > 0; --k) {
        bound[k] = start[k][bound[k + 1]];
    }
    ext_first_samples(s, bound, c);
    ext_update_centroids(s, bound, c);
}

// The trellis code (types/trellis.h) on the device. A lane's eight weights are eight steps in turn, whose symbols and their
// predecessors are bits of one window: byte c of the planes behind byte c - 1 of the last one, `start` before byte 0. A code is
// a look-up of the last 12 bits in a table (codes.metal), whose index is, from the low bits on,
//   K = 4:  c[t-2], c[t-1], c[t]        K = 3:  pair(t-2), pair(t), quad(t)        K = 2:  pair(t-4), pair(t-2), pair(t)

// K = 3: the windows of the low bits, from step -4 on, and of the high bits, from step -8 on, times 2^8.
template <typename B> static inline uint2 ggml_ext_trellis3_windows(device const B & x, short c) {
    const short n_lanes = sizeof(B::qh);
    const uint low_before  = c ? x.ql[n_lanes + c - 1] : x.start;
    const uint high_before = c ? x.qh[c - 1] : (x.start & 3) << 6;
    uint2 windows;
    windows.x = low_before | (uint) x.ql[c] << 8 | (uint) x.ql[n_lanes + c] << 16;
    windows.y = high_before << 8 | (uint) x.qh[c] << 16;
    return windows;
}
static inline ushort ggml_ext_trellis3_index(uint2 windows, short g) {
    return (windows.x >> 2*(g + 1) & 0xff) | (windows.y >> (g + 5) & 0xf00);
}

// K = 2: the window from step -8 on.
template <typename B> static inline uint ggml_ext_trellis2_window(device const B & x, short c) {
    const short n_lanes = sizeof(B::ql)/2;
    const uint before = c ? x.ql[c - 1] | (uint) x.ql[n_lanes + c - 1] << 8 : (uint) x.start << 8;
    return before | (uint) x.ql[c] << 16 | (uint) x.ql[n_lanes + c] << 24;
}
static inline ushort ggml_ext_trellis2_index(uint window, short g) {
    return window >> 2*(g + 3) & 0xfff;
}

// K = 4: the window from step -2 on, of ten symbols.
template <typename B> static inline uint2 ggml_ext_trellis4_windows(device const B & x, short c) {
    const short n_lanes = sizeof(B::ql)/4;
    const uint before = c ? x.ql[3*n_lanes + c - 1] : x.start;
    uint2 windows; // from step -2 and from step 2 on
    windows.y = x.ql[n_lanes + c] | (uint) x.ql[2*n_lanes + c] << 8 | (uint) x.ql[3*n_lanes + c] << 16;
    windows.x = before | (uint) x.ql[c] << 8 | windows.y << 16;
    return windows;
}
static inline ushort ggml_ext_trellis4_index(uint2 windows, short g) {
    return (g < 4 ? windows.x >> 4*g : windows.y >> 4*(g - 4)) & 0xfff;
}

// Position of value j in the order of the codes: in each block of EXT_ORDER values lane by lane (unpack.glsl), so that the eight weights of a lane
// meet eight neighbouring activations.
uint ext_ordered(const uint j) {
    const uint in_block = j % EXT_ORDER, n_lanes = EXT_ORDER/8;
    return j - in_block + 8*(in_block % n_lanes) + in_block/n_lanes;
}

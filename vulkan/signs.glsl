// Generated from ggml_ext/types.toml by scripts/build/gen_types.py; do not edit.
// Signs of the rotation.
const uint ext_signs[8] = uint[8](0xe18ae0c5u, 0xa289b7feu, 0x1e40d0c6u, 0x96201bafu, 0xd5b4ce30u, 0xd765edc7u, 0x98ec1743u, 0x6e45a49fu);

"""Counts the tokens of a text with libllama: python -I count_tokens.py LIBLLAMA MODEL TEXT N_BYTES prints "tokens N".

This is a separate program that needs only the standard library, because libllama may abort on a damaged vocabulary.
"""

import ctypes
import os
import sys
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int32, c_void_p


class ModelParams(ctypes.Structure):
    """struct llama_model_params of llama.h."""

    _fields_ = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


SIGNATURES = {
    "llama_model_default_params": (ModelParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_type": (c_int, [c_void_p]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
}
NO_VOCABULARY = 0  # LLAMA_VOCAB_TYPE_NONE


def count(library: str, model: str, text: bytes) -> int:
    """Count tokens as llama-imatrix does: including BOS and EOS, with special tokens in the text as plain text.

    ValueError if the model has no vocabulary.
    """
    llama = ctypes.CDLL(library)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    params = llama.llama_model_default_params()
    if (params.n_gpu_layers, params.vocab_only, params.use_extra_bufts) != (-1, False, True):
        raise ValueError(f"{library} has another llama_model_params")
    params.vocab_only = True
    loaded = llama.llama_model_load_from_file(os.fsencode(model), params)
    vocab = llama.llama_model_get_vocab(loaded) if loaded else None
    if not vocab or llama.llama_vocab_type(vocab) == NO_VOCABULARY:
        raise ValueError(f"{model} has no vocabulary")
    # without a buffer it returns the negative count
    return -llama.llama_tokenize(vocab, text, len(text), None, 0, True, False)


def main(library: str, model: str, path: str, n_bytes: str) -> None:
    with open(path, "rb") as f:
        text = f.read(int(n_bytes))
    # leave out a truncated character and, as llama.cpp's -f does, one newline at the end
    text = text.decode(errors="ignore").encode().removesuffix(b"\n")
    print(f"\ntokens {count(library, model, text)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""gguf-dump for files with our types: python -m ggml_ext.dump [options of gguf-dump] FILE"""

from gguf.scripts.gguf_dump import main

import ggml_ext  # noqa: F401  teaches gguf the types

if __name__ == "__main__":
    main()

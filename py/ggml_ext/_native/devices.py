"""Where llama.cpp's programs compute."""

from __future__ import annotations

from dataclasses import dataclass

from .._base.option import option


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The devices of llama.cpp's programs, in their syntax."""

    n_gpu_layers: str | None = option(
        None, short="-ngl", metavar="N", is_number=True, in_command=False, help="layers to keep in GPU memory, in llama.cpp's syntax"
    )
    device: str | None = option(None, metavar="LIST", in_command=False, help="devices, in llama.cpp's syntax (none: CPU only)")
    rpc: str | None = option(None, metavar="SERVERS", in_command=False, help="machines that run rpc-server: host:port, with commas")

    def arguments(self) -> tuple[str, ...]:
        """The words for a program's command line."""
        values = {"-ngl": self.n_gpu_layers, "--device": self.device, "--rpc": self.rpc}
        return tuple(word for flag, value in values.items() if value is not None for word in (flag, value))

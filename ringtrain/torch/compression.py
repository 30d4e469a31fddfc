"""The compressions under the name of Horovod's module, `horovod.torch.compression`."""

from ringtrain.engine.compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

"""Where states may live."""

from infinity.deepspeed.offload_devices import OffloadDeviceEnum, OffloadStateTypeEnum

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum"]

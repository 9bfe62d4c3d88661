"""Where states may live."""

from infinity.deepspeed.offload_devices import OffloadDeviceEnum

__all__ = ["OffloadDeviceEnum"]

"""Device functions of other libraries over anydevice: `lux`, `torchless`, `axiom`, `artifex`."""

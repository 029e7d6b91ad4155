"""Names of 0.2 that are now in `anydevice.extend`, until 0.4; each warns when it is used."""

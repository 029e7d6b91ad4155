"""Language models: load a folder, ask, and get text, on any device."""

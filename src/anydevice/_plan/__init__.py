"""Plans: whether a model fits, where, and how much memory it takes, before anything is loaded.

A plan is made in four steps, a module each:

1. `config`: a model's `config.json`, with the values that its family leaves out: the tables are in
   `families` for decoders and in `encoder_families` for all others;
2. `model`: the shape of a model, from a config (`encoder_families` for encoders,
   `quantization` for quantized weights) or from tensors: files of weights, modules, trees of
   arrays;
3. `estimates`: the memory of a shape, part by part (`training` for a training step);
4. `plan`: the layers on devices, by the memory that is free on each, and what would fit if the
   model does not.

A training on a cluster (`cards`) is planned by `training_plan`. `retry` finds out by trying.
"""

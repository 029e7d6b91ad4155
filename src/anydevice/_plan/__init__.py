"""Plans: whether a model fits, where, and how much memory it takes, before anything is loaded.

A plan is made in five steps, a module each:

1. `config`: a model's `config.json`, with what its family leaves out: the tables are in
   `architectures` for decoders and in `encoder_families` for all others;
2. `decoder` and `encoder`: the model's shape from its config, with quantized weights
   (`quantization`); `model` gives the shape of anything else: files of weights, modules, trees of
   arrays;
3. `estimates`: the memory of a shape, part by part (`training` for a training step), with what a
   process takes beside its tensors (`overheads`);
4. `placement`: its layers on devices, by the memory that is free on each (`available`);
5. `plan`: the answer, and what would fit if the model does not.

A training on a cluster (`cards`) is planned by `training_plan`, from the memory of a card
(`card_memory`) and the time of a step (`step_time`).

`batch_size` and `cpu_fallback` find out by trying.
"""

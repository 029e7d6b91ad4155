"""Proofs of properties of networks, and the search for them. The public names are in `proofs.py`.

`prove(model, property, region)` goes through these files:

1. `properties.py`: the property and the region become queries, which are rows of rational numbers.
2. `lowering.py`: the model becomes a `Network` of affine nodes and elementwise functions.
   `graph.py` builds it, and the network of its derivative for `monotone` and `lipschitz`;
   `tracing.py` records modules of PyTorch and JAX; `evaluation.py` compares the two. ONNX and
   VNN-LIB files come through `files.py`; `onnx_lowering.py` lowers ONNX a second time, and
   `execution.py` compares both with an execution.
3. `prove.py`: one search for each query. `search.py` is branch and bound; `bounds.py` has the
   bounds (IBP and CROWN); `neurons.py` splits ReLUs (β-CROWN); `lemmas.py` bounds neurons better;
   `attack.py` looks for counterexamples (PGD). `machines.py` is where they compute.
4. `checking/`: the certificate is checked, with NumPy alone and none of the code above.
5. `claims.py` attaches the proof to a model.

`certified.py` is a loss that trains models whose robustness can be proved.
"""

"""The bundled job, as a rank runs it: data, model, trainer.

It imports torch, transformers and trl, so the control plane never imports it.
"""

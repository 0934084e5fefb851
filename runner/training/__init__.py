"""What a rank runs: data, model, trainer. Imports torch, transformers and trl; the control plane never imports this."""

"""A sentence encoder is trained with Sentence Transformers, as its documentation shows."""

import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)

data, out = sys.argv[1:]
encoder = models.Transformer(f"{data}/model")
model = SentenceTransformer(modules=[encoder, models.Pooling(64)], device="cpu")
rows = [(f"what is {one} plus {other}?", f"the sum is {one + other}") for one in range(20) for other in range(8)]
dataset = Dataset.from_dict({"anchor": [row[0] for row in rows], "positive": [row[1] for row in rows]})
arguments = SentenceTransformerTrainingArguments(
    output_dir=out,
    max_steps=20,
    save_steps=5,
    logging_steps=1,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    report_to="none",
    use_cpu=True,
)
trainer = SentenceTransformerTrainer(
    model=model, args=arguments, train_dataset=dataset, loss=losses.MultipleNegativesRankingLoss(model)
)
trainer.train()
model.save_pretrained(f"{out}/final")

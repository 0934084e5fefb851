"""A classifier of a few examples with SetFit, as its documentation shows: a sentence encoder, then a head."""

import sys

from datasets import Dataset
from sentence_transformers import SentenceTransformer, models
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression

data, out = sys.argv[1:]
encoder = SentenceTransformer(modules=[models.Transformer(f"{data}/model"), models.Pooling(64)], device="cpu")
model = SetFitModel(model_body=encoder, model_head=LogisticRegression())
texts = [f"what is {one} plus {other}?" for one in range(8) for other in range(4)]
dataset = Dataset.from_dict({"text": texts, "label": [number % 2 for number in range(len(texts))]})
arguments = TrainingArguments(
    output_dir=out, max_steps=20, save_steps=5, logging_steps=1, batch_size=4, report_to="none", save_strategy="steps"
)
trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
trainer.train()
model.save_pretrained(f"{out}/final")

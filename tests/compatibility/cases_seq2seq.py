"""Seq2SeqTrainer and sentence-transformers."""

from __future__ import annotations

from typing import Any

import torch
from compatibility import tiny
from compatibility.ranks import Run
from compatibility.table import case
from datasets import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)


def _t5() -> Any:
    torch.manual_seed(1)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=tiny.VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=1,
            pad_token_id=1,
            eos_token_id=0,
        )
    )


def _seq2seq(run: Run, **options: Any) -> Any:
    model, tokenizer = _t5(), tiny.tokenizer()
    return Seq2SeqTrainer(
        model,
        tiny.arguments(run, Seq2SeqTrainingArguments, **options),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=tiny.dataset(),
        eval_dataset=tiny.dataset(4),
        processing_class=tokenizer,
    )


@case("seq2seq/defaults", stock=True)
def _defaults(run: Run) -> None:
    run.train(_seq2seq(run))


@case("seq2seq/predict_with_generate", stock=True)
def _generate(run: Run) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "generation_max_length": 4}
    run.train(_seq2seq(run, predict_with_generate=True, **options))


def _sentences(run: Run, **options: Any) -> Any:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertModel

    folder = run.folder / f"bert-{run.rank}"
    if not folder.exists():
        tiny.bert(BertModel).save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    transformer = Transformer(str(folder))
    model = SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu")
    pairs = options.pop("dataset", None) or Dataset.from_list(
        [{"anchor": tiny.text(number), "positive": tiny.text(number + 50)} for number in range(tiny.NUM_ROWS)]
    )
    return SentenceTransformerTrainer(
        model=model,
        args=tiny.arguments(run, SentenceTransformerTrainingArguments, **options),
        train_dataset=pairs,
        loss=MultipleNegativesRankingLoss(model),
    )


@case("sentence-transformers/pairs", stock=True, needs=("sentence_transformers",))
def _pairs(run: Run) -> None:
    run.train(_sentences(run))


@case("sentence-transformers/no duplicates in a batch", stock=True, needs=("sentence_transformers",))
def _no_duplicates(run: Run) -> None:
    run.train(_sentences(run, batch_sampler="no_duplicates"))


@case("sentence-transformers/several data sets", stock=True, needs=("sentence_transformers",))
def _several(run: Run) -> None:
    from datasets import DatasetDict

    both = DatasetDict(
        {
            name: Dataset.from_list(
                [{"anchor": tiny.text(number + at), "positive": tiny.text(number + at + 50)} for number in range(10)]
            )
            for name, at in (("first", 0), ("second", 20))
        }
    )
    run.train(_sentences(run, dataset=both, multi_dataset_batch_sampler="round_robin"))


@case("sentence-transformers/data sets by size", stock=True, needs=("sentence_transformers",))
def _proportional(run: Run) -> None:
    from datasets import DatasetDict

    both = DatasetDict(
        {
            name: Dataset.from_list(
                [{"anchor": tiny.text(number + at), "positive": tiny.text(number + at + 50)} for number in range(count)]
            )
            for name, at, count in (("first", 0, 12), ("second", 20, 8))
        }
    )
    run.train(_sentences(run, dataset=both, multi_dataset_batch_sampler="proportional"))

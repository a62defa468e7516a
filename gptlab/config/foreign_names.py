"""Names of arguments in nanoGPT, modded-nanogpt, autoresearch and nanochat, and what each is called here.

Sources: nanoGPT's train.py and its config files, the argument parsers of modded-nanogpt's train_gpt2.py (October 2024)
and of nanochat's scripts/base_train.py (February 2026), the constants of autoresearch's train.py and prepare.py. An
answer says so where the unit is another one. A name whose last part is a field's own (n_head, dropout) is not listed:
the nearest field is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

_WANDB = "--log.to wandb sends the metrics there; without it they are in the run folder's metrics.jsonl alone"
_ADAMW = "each group of weights has its own: --optim.matrix.{0}, --optim.embedding.{0}, --optim.head.{0}, ..."
_ITERS = "a share of the run, not steps: "

_ANSWERS_BY_NAMES: Mapping[str, str] = {
    # How long, how much at a time.
    "max_iters num_iterations max_steps": "--steps N",
    "epochs": "--tokens N; the log counts epochs",
    "target_flops": "--flops X",
    "target_param_data_ratio": "--tokens-per-param X",
    "time_budget": "--minutes X (autoresearch: seconds)",
    "batch_size": (
        "--batch.micro-sequences N, rows in one forward and backward pass (nanoGPT); the whole step is counted in "
        "tokens, --batch.total-tokens N = rows x --model.seq-len x accumulation"
    ),
    "gradient_accumulation_steps": (
        "--batch.total-tokens N, which is rows x --model.seq-len x accumulation steps; the number of passes follows "
        "from it and --batch.micro-sequences"
    ),
    "device_batch_size": "--batch.micro-sequences N, rows in one forward and backward pass",
    "total_batch_size": (
        "--batch.total-tokens N, tokens in one step, which leaves the learning rates alone; in the recipe nanochat "
        "--total-batch-size N scales them too"
    ),
    "accumulation": "--batch.total-tokens N, which is rows x --model.seq-len x accumulation steps",
    # The network.
    "block_size sequence_length max_seq_len context_length": "--model.seq-len N",
    "n_layer num_layers": (
        "--depth N, from which width and rates follow in recipes that have a dial, or --model.n-layer N alone"
    ),
    "vocab_size": "--tokenizer.vocab-size N",
    "aspect_ratio": "width over depth, an argument of the recipe nanochat; here --model.n-embd N",
    "head_dim": "an argument of the recipe nanochat; here --model.n-head N, which is width over head width",
    # Rates and schedule.
    "learning_rate lr": _ADAMW.format("lr") + "; Muon's is --optim.muon.lr",
    "min_lr": "--schedule.final-lr-scale X, a factor on the peak rate (nanoGPT: a rate), so min_lr / learning_rate",
    "final_lr_frac": "--schedule.final-lr-scale X",
    "decay_lr": (
        "--schedule.kind trapezoid --schedule.warmup-fraction 0 --schedule.warmdown-fraction 0 keeps the rate constant "
        "from the first step on (nanoGPT's decay_lr=False, which has no warm-up either)"
    ),
    "lr_decay_iters": "the cosine ends with the run: --steps N, or --schedule.kind cosine to choose it",
    "warmup_iters": (
        _ITERS + "--schedule.warmup-fraction X = (warmup_iters + 1) / all steps (modded-nanogpt: without the + 1)"
    ),
    "warmup_steps": _ITERS + "--schedule.warmup-fraction X = warm-up steps / all steps",
    "warmup_ratio": "--schedule.warmup-fraction X",
    "warmdown_iters": _ITERS + "--schedule.warmdown-fraction X = warm-down steps / all steps",
    "warmdown_ratio": "--schedule.warmdown-fraction X",
    "weight_decay": _ADAMW.format("weight-decay") + "; Muon's is --optim.muon.weight-decay",
    "beta1 adam_beta1": _ADAMW.format("beta1"),
    "beta2 adam_beta2": _ADAMW.format("beta2"),
    "adam_betas": _ADAMW.format("beta1") + " and beta2",
    "grad_clip": "--optim.grad-clip X; none turns it off (nanoGPT: 0.0)",
    "embedding_lr": "--optim.embedding.lr X, as it is used; the recipe nanochat takes --embedding-lr before scaling",
    "unembedding_lr": "--optim.head.lr X, as it is used; the recipe nanochat takes --unembedding-lr before scaling",
    "matrix_lr": "--optim.muon.lr X, as it is used; the recipe nanochat takes --matrix-lr before scaling",
    "scalar_lr": "--optim.x0-lambda.lr X, as it is used; the recipe nanochat takes --scalar-lr before scaling",
    # Written by a recipe.
    "recipe_arguments": "the recipe writes it; its own arguments have names, such as nanochat's --embedding-lr",
    # Evaluation, samples, checkpoints, log.
    "eval_interval": "--eval.every-steps N",
    "eval_every": "--eval.every-steps N; none for never (nanochat: -1)",
    "val_loss_every": "--eval.every-steps N; none for never (modded-nanogpt: 0)",
    "eval_iters": "--eval.tokens N, validation tokens (nanoGPT: batches), so eval_iters x batch_size x block_size",
    "val_max_steps": "--eval.tokens N, validation tokens (modded-nanogpt: batches)",
    "val_tokens eval_tokens": "--eval.tokens N",
    "eval_only": "--eval.only; for a run that exists, gptlab eval RUN",
    "core_metric_every": "--eval.core-every-steps N; none for never (nanochat: -1)",
    "core_metric_max_per_task": "--eval.core-examples N",
    "sample_every": "--sample.every-steps N; none for only at the end (nanochat: -1 for never)",
    "save_every": "--checkpoint.every-steps N; none for only at the end (nanochat: -1, modded-nanogpt: 0)",
    "always_save_checkpoint": "--checkpoint.every-steps N; --checkpoint.save-best saves at each best validation",
    "resume_from_step": "--resume RUN, from its newest checkpoint",
    "log_interval": "--runtime.log-every-steps N",
    "out_dir output_dir model_tag": "--run-dir FOLDER",
    "run": "--run-dir FOLDER names a run (nanochat: its name at wandb); " + _WANDB,
    # Data.
    "dataset": "--data FOLDER, such as nanoGPT's data/NAME, or a name of `gptlab data list`",
    "input_bin": "--data 'GLOB' --data.rows sequential",
    "input_val_bin": "--data.val-source 'GLOB'",
    # Machine.
    "device_type": "--device cpu, cuda, mps or auto (nanochat: empty)",
    "backend": "chosen by the device: nccl for CUDA, gloo elsewhere",
    "fp8": "--runtime.fp8 true",
    "fp8_recipe": "float8 is always scaled by tensor (nanochat: tensorwise)",
    "compile_model": "--compile on, off or auto",
    # Wandb.
    "wandb wandb_log wandb_project": _WANDB,
    "wandb_run_name": "--run-dir FOLDER names a run; " + _WANDB,
}
_ANSWERS = {name: answer for names, answer in _ANSWERS_BY_NAMES.items() for name in names.split()}

# train.py's own data set, of which data/openwebtext/prepare.py holds out 0.0005, and 500 batches of 8 x 1024 tokens.
_EVAL_GPT2 = (
    "gptlab train nanogpt/finetune --init-from {0} --data openwebtext --data.split hash --data.val-fraction 0.0005 "
    "--eval.only --eval.tokens 4096000 --eval.train-tokens 4096000"
)
_CONFIG_FILES: Mapping[str, str] = {
    "train_shakespeare_char": "gptlab train nanogpt/shakespeare-char",
    "train_gpt2": "gptlab train nanogpt/gpt2-124m",
    "finetune_shakespeare": "gptlab train nanogpt/finetune",
    "eval_gpt2": _EVAL_GPT2.format("gpt2"),
    "eval_gpt2_medium": _EVAL_GPT2.format("gpt2-medium"),
    "eval_gpt2_large": _EVAL_GPT2.format("gpt2-large"),
    "eval_gpt2_xl": _EVAL_GPT2.format("gpt2-xl"),
}
"""nanoGPT's config/NAME.py."""


def answer(name: str) -> str | None:
    """What an argument of another program is called here, by its name in either spelling; None for an unknown one."""
    return _ANSWERS.get(name.lower().replace("-", "_"))


def config_file_answer(word: str) -> str | None:
    """The command that does what one of nanoGPT's config files does."""
    return _CONFIG_FILES.get(word.replace("\\", "/").rpartition("/")[2].removesuffix(".py"))

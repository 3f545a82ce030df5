#!/bin/sh
# From nothing to an answer of a chat model: sh speedrun.sh. Started again, it resumes where it stopped.
: "${GPUS:=8}"             # or 1, 2, 4
: "${TOKENS:=2000000000}"  # of FineWeb-Edu; GPT-2's size is trained on them once
: "${PREPARE=}" "${TRAIN=}" "${CHAT=}" "${EVALUATE=}"  # more flags for each step
set -e

[ -d .venv ] || { python3 -m venv .venv && .venv/bin/pip install -r requirements.txt; }
. .venv/bin/activate
run="torchrun --standalone --nproc_per_node=$GPUS"

python prepare_data.py --max_tokens="$TOKENS" $PREPARE
$run train_gpt2.py config/speedrun.py --init_from=auto --max_iters=$((TOKENS / 131072)) $TRAIN
$run chat_sft.py --init_from=auto:out/ckpt.pt $CHAT
$run evaluate.py --checkpoint=out-chat $EVALUATE
python sample.py --checkpoint=out-chat --chat=True --prompt='Why is the sky blue?'

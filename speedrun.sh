#!/bin/sh
# From scratch to a chat model's first answer: sh speedrun.sh. Run it again, and it resumes where it stopped.
: "${GPUS:=8}"             # or 1, 2, 4
: "${TOKENS:=2000000000}"  # of FineWeb-Edu; a model of GPT-2's size sees them once, 131072 per step
: "${PREPARE=}" "${TRAIN=}" "${CHAT=}" "${EVALUATE=}"  # more flags for each step
# 2**20 of them are for validation, and a step needs 131072
[ "$TOKENS" -ge 1179648 ] 2>/dev/null || { echo "error: TOKENS=$TOKENS: expected an integer of at least 1179648" >&2; exit 2; }
set -e

if [ ! -e .venv/ready ]; then python3 -m venv .venv; .venv/bin/pip install -r requirements.txt; touch .venv/ready; fi
. .venv/bin/activate
run="torchrun --standalone --nproc_per_node=$GPUS"
data=data/speedrun-$TOKENS out=out-speedrun-$TOKENS

python prepare_data.py --data_dir=$data --max_tokens=$TOKENS $PREPARE
$run train_gpt2.py config/speedrun.py --init_from=auto --data_dir=$data --out_dir=$out --max_iters=$((TOKENS / 131072)) --eval_interval=2000 $TRAIN
$run chat_sft.py --init_from=auto:$out/ckpt.pt --out_dir=$out-chat $CHAT
$run evaluate.py --checkpoint=$out-chat $EVALUATE
python sample.py --checkpoint=$out-chat --chat=True --prompt='Why is the sky blue?'

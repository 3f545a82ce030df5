# GPT-2 124M on FineWeb-Edu for 10,000 steps of 128 rows, 1.3 B tokens
#   torchrun --nproc_per_node=8 train_gpt2.py config/gpt2_baseline.py
max_iters = 10000

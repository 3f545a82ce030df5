# GPT-2 124M on FineWeb-Edu for 10,000 steps of 128 rows, 1.3 B tokens
#   python train_gpt2.py config/gpt2_baseline.py --optimizer=adamw_spam --sparsity=0.5
max_iters = 10000
batch_size = 32  # times 4 is 16 * 8, the default: the same model, for GPUs with room for it
gradient_accumulation_steps = 4

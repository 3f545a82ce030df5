# config/gpt2_baseline.py with SPAM and pruning, with the constants of a project that reported a perplexity of 42.82
# at step 10,000 of a 50,000-step cosine; for that schedule add --lr_decay_iters=50000.
#   torchrun --nproc_per_node=8 train_gpt2.py config/gpt2_spam.py
max_iters = 10000
optimizer = "adamw_spam"
spam_theta = 50.0
spam_interval = 1000
spam_warmup = 1000
sparsity = 0.5
prune_begin = 1000

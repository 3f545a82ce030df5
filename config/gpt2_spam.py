# config/gpt2_baseline.py with SPAM and pruning, with the constants of the project that reported a perplexity of 42.82.
# That one read it at step 10,000 of a cosine over 50,000; add --lr_decay_iters=50000 to do the same.
#   torchrun --nproc_per_node=8 train_gpt2.py config/gpt2_spam.py
max_iters = 10000
optimizer = "adamw_spam"
spam_theta = 50.0
spam_interval = 1000
spam_warmup = 1000
sparsity = 0.5
prune_begin = 1000

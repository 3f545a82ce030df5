# config/gpt2_baseline.py with multi-head latent attention: keys and values come from a 128-wide latent, the only thing
# cached when decoding, a twelfth of what multi-head attention keeps
max_iters = 10000
attention = "mla"
kv_lora_rank = 128

# the GPT-2 baseline with multi-head latent attention: keys and values come from a 128-wide latent, the only thing cached
# when decoding, a twelfth of what multi-head attention keeps; everything else is GPT-2 124M's default
batch_size = 32
gradient_accumulation_steps = 4
attention = "mla"
kv_lora_rank = 128

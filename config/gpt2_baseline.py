# GPT-2 124M on FineWeb-Edu with 128 rows a step as 32 x 4 instead of 16 x 8: the same model, for GPUs with room for it
batch_size = 32
gradient_accumulation_steps = 4

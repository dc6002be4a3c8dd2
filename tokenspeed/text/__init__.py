"""Where text meets tokens: model resolution, tokenizer, chat template, detokenizer, stop matcher.
No torch.
"""

"""The paged KV cache: specs, pool, page allocator, prefix tree."""

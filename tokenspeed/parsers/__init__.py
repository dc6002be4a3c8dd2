"""What a model wrote, taken apart while it comes: reasoning, content and tool calls. No torch."""

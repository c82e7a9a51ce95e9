"""Reading the text of an answer as it arrives; what parsers of tool calls and reasoning stand on."""

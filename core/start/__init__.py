"""What a core process does around the loading of its model: launch line, address, status page, parent."""

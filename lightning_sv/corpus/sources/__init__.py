"""Where text comes from: the standard library, files, datasets of the hub; each a stream of documents."""

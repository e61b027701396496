"""Reports of evaluated figures: a page, the same in Markdown, pictures, CSV."""

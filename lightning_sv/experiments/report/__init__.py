"""What a reader gets of judged figures: a page, the same in Markdown, pictures, CSV."""

"""The book: its figures, and what builds its pages. It may import `lib` and `course`, which do not know it."""

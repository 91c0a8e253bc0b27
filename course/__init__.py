"""The course: it judges answers, grades homeworks, and packs them. It may import `lib`, which does not know it."""

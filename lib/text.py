"""The text that the book trains on: little stories written by a grammar, the same bytes on every machine.

The problem: losses can be compared only on one text, which every machine has without a download and which never
changes. A small GPT must find more in it the longer it trains: letters, words, sentences, names that return.
The idea: an alternative of the rule `<noun>` replaces `<noun>` in a sentence. Random numbers from a fixed seed draw the
first alternatives often and the last seldom, because few words of a language are frequent and most are rare (Zipf).
Each story draws its own cast, two names, a place, a thing and a sum, which return until it ends. Each chapter draws
favourite words, so that the text differs from part to part, as the batches of two ranks should.
"""

import random
import re

GRAMMAR = r"""
<title> = The <adjective> <thing>|<her> and the <thing>|<him> and the <adjective> <noun>|How <him> <verb>ed the <noun>
<story> = <opening> <talk> <body> <end>|<opening> <body> <body> <end>|<opening> <body>\n\n    <code>\n\n<talk> <end>|
  <opening> <body>\n\n* <a> <thing>s, <adjective> and <adjective>;\n* <b> <noun>s <where>.\n\n<talk> <end>
<opening> = <her> <verb>ed a <adjective> <thing> <where>.|Once a <noun> <verb>ed <her> and <him> <where>.|
  There were <a> <thing>s <where>, and <her> <verb>ed them <how>.|It was <adjective> when <him> <verb>ed the <thing>.
<body> = <fact> <fact>|<fact> <fact> <fact>|<fact> <talk> <fact>|<fact> <talk>\n\n<fact> <talk> <fact> <fact>|<fact>
<fact> = She <verb>ed the <thing> and <verb>ed a <adjective> <noun> <where>.|
  Every <noun> <verb>s a <noun>, and all <noun>s <verb> the <thing>.|He <verb>ed the <adjective> <thing> <how>.|
  The <adjective> <noun> <verb>s <number> <noun>s <where>.|<her> had <a> <thing>s, <him> <b>: <a> + <b> = <sum>.|
  Rank <digit> <verb>s the <noun> of rank <digit>, and rank <digit> <verb>s a <adjective> <noun>.|
  While <him> <verb>ed <number> <noun>s, <her> <verb>ed the <place>.|The <noun>s <verb> the <noun> <how>.|
  No <noun> was <adjective> (but the <thing> of <her> was <adjective> and <adjective>).|
  After the <adjective> <noun> came a <adjective> one, then <number> <noun>s <where>.
<talk> = "Today <clause>," said <her>.|"<him>, <clause>," said <her>.|"<question>?" asked <him>. "Yes, <clause>."|
  <him> <verb>ed the <thing>: "<her>, <verb> the <noun>!"|"If <clause>, <clause>," said <him>.
<clause> = the <noun>s <verb> the <thing>|we <verb> <number> <noun>s <how>|the <noun> <verb>s us <how>|
  you <verb> the <adjective> <noun> <where>|they <verb> <b> <noun>s|I <verb> a <noun>
<question> = Who <verb>s the <adjective> <noun>|Did the <noun> <verb> <number> <noun>s <where>|Which <noun>s <verb> us
<where> = at the <home>|near the <place>|behind the <noun>|between the <noun> and the <noun>|in the <place> of <him>
<how> = slowly|twice|again|at noon|in turn|quickly|with care|alone|before dawn|on Mondays|without a word|like a <noun>
<code> = for <thing> in <noun>s:\n        <verb>(<thing>, <number>=<a>)\n    assert <a> + <b> == <sum>|
  def <verb>(<thing>s):\n        return <thing>s[<a>:<sum>]  # <b> <thing>s, <how>
<end> = So the <thing> was <adjective> again.|And <her> <verb>ed <him> <how>.|In the end <a> and <b> were <sum>.
<digit> = 0|1|2|3|4|5|6|7
<number> = two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty
<woman> = Ada|Grace|Barbara|Frances|Mary|Shafi|Karen|Radia|Sophie|Hedy|Jean|Lynn|Emmy|Betty|Susan|Rosa|Katherine
<man> = Alan|Edsger|Donald|Leslie|Norbert|Tony|John|Niklaus|Dennis|Robin|Edgar|Ken|Kurt|Leonhard|Carl|Otto|Blaise
<place> = harbour|station|market|library|bridge|lighthouse|school|mill|garden|tunnel|village|bakery|workshop|square
<noun> = ship|train|rank|letter|lamp|crate|stage|wagon|ladder|rope|map|bell|signal|tower|boat|crane|clock|coin|basket|
  book|page|ticket|driver|sailor|captain|baker|pilot|porter|window|door|cart|wheel|flag|mirror|candle|drum|bottle|
  button|hammer|kettle|lantern|needle|pebble|puzzle|ribbon|rocket|spoon|stone|trumpet|violin|token|shard|layer|ring|
  message|bucket|gradient|kernel|number|bubble|weight|tensor|giant|wizard|rabbit|tiger|penguin|dragon|cloud|banana
<adjective> = small|red|quiet|heavy|green|patient|careful|bright|slow|round|wooden|narrow|deep|silver|golden|hollow|
  brave|lonely|warm|cold|dusty|rusty|broken|tired|hungry|proud|sleepy|tiny|tall|curious|new|distant|hidden|yellow
<verb> = load|count|pull|lift|follow|paint|mend|open|help|greet|visit|ask|call|cover|turn|gather|sort|test|train|
  collect|answer|return|start|check|pack|link|warn|weigh|want|anchor|need|board|borrow|scatter|shift|join|toast|protect
"""
CAST = {"<her>": "<woman>", "<him>": "<man>", "<home>": "<place>", "<thing>": "<noun>"}
CHAPTERS, STORIES = 32, 40  # stories of a chapter


def stories(seed: str) -> bytes:
    """The stories, about 470 kB of ASCII."""
    draw = random.Random(seed).random  # from a string: the same numbers in every version of Python
    rules = {}
    for rule in re.split(r"\n(?=<\w+> = )", GRAMMAR.strip().replace(r"\n", "\n")):
        symbol, alternatives = rule.split(" = ", 1)
        rules[symbol] = [re.split(r"(<\w+>)", text) for text in re.split(r"\s*\|\s*", alternatives)]
    words = {symbol: rules[symbol] for symbol in (*CAST.values(), "<adjective>", "<verb>")}

    def expand(symbol: str) -> str:
        number = draw()
        parts = rules[symbol][int(number * number * len(rules[symbol]))]
        return "".join([expand(part) if part in rules else part for part in parts])

    told = []
    for _ in range(CHAPTERS):
        rules |= {symbol: [[expand(symbol)], [expand(symbol)], *known] for symbol, known in words.items()}
        for _ in range(STORIES):
            rules |= {role: [[expand(symbol)]] for role, symbol in CAST.items()}
            a, b = 10 + int(90 * draw()), 10 + int(90 * draw())
            rules |= {"<a>": [[str(a)]], "<b>": [[str(b)]], "<sum>": [[str(a + b)]]}
            told.append(f"# {expand('<title>')}\n\n{expand('<story>')}\n\n")
    return "".join(told).encode()


TEXT = stories("parallel by hand")  # takes 0.05 s; ranks are forked from a process that has it

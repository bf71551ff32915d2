"""Templates and word lists of `seeds.py`, written for this project.

Slots in braces are filled from the lists at the end of the file.
"""

from __future__ import annotations

from typing import Final

CODE_TASKS: Final = (
    "Explain what this {lang} code does.\n\n```{lang}\n{text}\n```",
    "Review the code below and point out {n} possible problems.\n\n```{lang}\n{text}\n```",
    "Add comments to this code and return all of it:\n\n```{lang}\n{text}\n```",
    "Rewrite this in {other}:\n\n```{lang}\n{text}\n```",
    "Here is a part of a larger file. What comes next?\n\n```{lang}\n{text}\n```",
    "```{lang}\n{text}\n```\n\nRename the variables so that they are easier to read.",
    "Can you simplify this without changing its behaviour?\n\n```{lang}\n{text}\n```",
    "What would a beginner find confusing here, and why?\n\n```{lang}\n{text}\n```",
)
FUNCTION_TASKS: Final = (
    "What does this function return, and when does it fail?\n\n```python\n{text}\n```",
    "Write a docstring for this function.\n\n```python\n{text}\n```",
    "Write unit tests with pytest for the following function:\n\n```python\n{text}\n```",
    "Refactor this function into smaller ones.\n\n```python\n{text}\n```",
    "Add type hints to this function and print the whole of it.\n\n```python\n{text}\n```",
    "Translate this Python function to {other}.\n\n```python\n{text}\n```",
    "Walk me through this function line by line:\n\n```python\n{text}\n```",
    "Is there a bug in this function? If so, fix it.\n\n```python\n{text}\n```",
    "Make this function faster, and explain what you changed:\n\n```python\n{text}\n```",
    "Copy the function below, but rename it and handle errors properly.\n\n```python\n{text}\n```",
)
STUB_TASKS: Final = (
    "Complete this Python function.\n\n```python\n{text}\n```",
    "Implement the function described by this docstring:\n\n```python\n{text}\n```",
    "Write the body of the function below so that it does what it says.\n```python\n{text}\n```",
    "Solve this programming task in Python.\n\n```python\n{text}\n\n```",
    "Fill in the missing code:\n```python\n{text}\n    # your code here\n```",
    "```python\n{text}\n```\nPlease finish this function and show an example of its use.",
)
PASSAGE_TASKS: Final = (
    "Summarize the text below in {n} sentences.\n\n{text}",
    "Summary in one paragraph, please:\n\n{text}",
    "{text}\n\nTL;DR:",
    "What are the {n} most important points of this text?\n\n{text}",
    "Rewrite this passage {style}.\n\n{text}",
    "Translate this text into {language}:\n\n{text}",
    "Explain the following to {reader}:\n\n{text}",
    "Continue this text in the same tone:\n\n{text}",
    "Read this passage.\n\n{text}\n\nNow write {n} questions about it, with answers.",
    "Context:\n{text}\n\nUsing only this context, say what it is mainly about.",
    "Documentation:\n{text}\n\nQuestion: how would I use this in practice?",
    "Find names, numbers and dates in this text and list them:\n\n{text}",
    "Correct grammar and spelling, and return the corrected text:\n\n{text}",
    "Give this text a title and {n} keywords.\n\n{text}",
)

#: kind -> templates; `problem` is made by `seeds.word_problem`.
INVENTED: Final[dict[str, tuple[str, ...]]] = {
    "problem": (),
    "explain": (
        "Explain {topic} to {reader}.",
        "What is {topic}, and why does it matter?",
        "How does {topic} work?",
        "Give me {n} facts about {topic}.",
        "What do most people get wrong about {topic}?",
        "Describe the history of {topic} in a few paragraphs.",
        "Compare {topic} with {topic2}. Where do they differ?",
        "What are the advantages and disadvantages of {topic}?",
        "I have an exam on {topic} tomorrow. What should I know?",
        "Write a short encyclopedia article about {topic}.",
        "Why is {topic} important for {topic2}?",
    ),
    "fact": (
        "What is the capital of {country}, and what is it known for?",
        "Which languages do people speak in {country}?",
        "Who invented {invention}?",
        "When was {invention} invented, and how did it change daily life?",
        "Tell me about the geography of {country}.",
        "What food is typical of {country}?",
        "Name {n} animals that live in {country}.",
        "Which is larger, {country} or {country2}?",
    ),
    "write": (
        "Write a {form} about {subject}.",
        "Write a {form} {style} about {subject}.",
        "Write a {mood} story in which {person} finds {thing} in {place}.",
        "Draft an e-mail from {person} to {person2} about {matter}.",
        "Compose a product description for {thing}.",
        "Write the opening paragraph of a novel set in {place}.",
        "Write a dialogue between {person} and {person2} about {topic}.",
        "Write a blog post titled '{n} things I learned from {subject}'.",
        "Write a {mood} speech about {subject} for {reader}.",
        "Write a review of a {mood} film about {subject}.",
    ),
    "plan": (
        "Give me a plan for {goal} in {n} steps.",
        "How do I start with {hobby}?",
        "List {n} ideas for {goal}.",
        "Make a weekly schedule for someone who wants to practise {hobby}.",
        "What should I pack for a trip to {country}?",
        "Suggest {n} gifts for {person} who likes {hobby}.",
        "I feel stuck with {goal}. What would you advise?",
        "Make a table with {n} rows that compares ways of {goal}.",
        "Write a recipe with {food} and {food2}.",
        "What can I cook with {food}, {food2} and rice?",
    ),
    "role": (
        "Pretend you are {person}. Describe a normal day of yours.",
        "You are {person}. Explain {topic} in your own words.",
        "Act as {person} who interviews {person2}. Ask {n} questions.",
        "Imagine {person} meets {person2} in {place}. What happens?",
        "Answer as {person} would: what do you think of {hobby}?",
    ),
    "code": (
        "Write a Python function that {task}.",
        "Write a {code_language} function that {task}, with comments.",
        "Write a Python program that {task} and prints the result.",
        "How do I {how} in {code_language}? Show an example.",
        "Write a Python function that {task}, and {n} tests for it.",
        "Write a class in {code_language} that models {thing}.",
        "Explain the difference between {concept} and {concept2} with code examples.",
        "Write a regular expression that matches {pattern}, and explain it.",
        "Write an SQL query that finds {query}.",
        "Write a shell command that {shell}.",
    ),
    "translate": (
        'Translate to {language}: "{sentence}"',
        'How do you say "{sentence}" in {language}?',
        'Translate the following into {language} and explain the grammar: "{sentence}"',
        'Rephrase this sentence {style}: "{sentence}"',
        'Is this sentence correct? "{sentence}" Give {n} variations of it.',
    ),
    "maths": (
        "What is {number} times {number2}? Show how you get there.",
        "Solve for x: {number}x + {number2} = {number3}.",
        "Simplify the fraction {number}/{number2}.",
        "What is {number} percent of {number3}?",
        "A rectangle is {number} cm long and {number2} cm wide. Find its area and perimeter.",
        "Find the mean and the median of {number}, {number2}, {number3} and {number4}.",
        "Is {number3} a prime number? Explain.",
        "Convert {number} kilometres to miles, and {number2} kilograms to pounds.",
        "What is the next number: {number}, {number2}, {number3}? Guess a rule.",
        "Expand (x + {number})(x - {number2}).",
        "What is the derivative of {number}x^3 + {number2}x^2 - {number3}x?",
        "How many ways are there to choose 3 of {number} people?",
    ),
    "reason": (
        "If {person} is older than {person2}, and {person2} is older than {person3}, who is "
        "youngest?",
        "{person} has to choose between {goal} and {hobby}. Argue for both sides.",
        "Is it possible that {subject} and {topic} are related? Think it through.",
        "Which of these does not belong: {food}, {food2}, {thing}, {food3}? Why?",
        "Sort these by size and explain: {thing}, {thing2}, {thing3}.",
        "What would happen if there were no {topic}?",
        "Give arguments for and against {matter}.",
        'Classify the mood of this message as positive, negative or neutral: "{sentence}"',
    ),
}
INVENTED_WEIGHTS: Final = {
    "problem": 3.0, "explain": 2.0, "fact": 1.0, "write": 2.0, "plan": 1.2, "role": 0.7,
    "code": 3.0, "translate": 1.0, "maths": 1.3, "reason": 0.8,
}  # fmt: skip

WORD_PROBLEMS: Final = (
    "{name} buys {a} boxes of {thing} with {b} in each box and gives {c} of them away. How many "
    "are left if none was lost?",
    "A shop in {place} sells {thing} for {a} dollars each. {name} buys {b} and {other} buys {c}. "
    "How much do they pay together?",
    "{name} saves {a} dollars a week, and {other} saves {b} dollars a week. After {c} weeks, how "
    "much more has one of them than the other?",
    "There are {ab} {thing} in {b} equal piles. {name} takes one pile and finds {c} more. How many "
    "does {name} have now?",
    "{name} walks {a} minutes to {place}, stays {b} minutes and walks back. How long is the way "
    "there and back over {c} days, with the stays?",
    "A ticket to {place} costs {big} dollars. {name} gets {pct} percent off and pays for {a} "
    "people. What is the price?",
    "{name} reads {a} pages each morning and {b} each evening. How many days does a book of {big} "
    "pages take, and how many pages are read on the last day?",
    "{other} has {a} more {thing} than {name}, who has {b}. They put them together and share them "
    "with a third person equally. How many does each get, and how many remain?",
    "A tank holds {big} litres. It loses {a} litres an hour, and {name} pours in {b} litres every "
    "hour. How much is in it after {c} hours if it was full at first?",
    "In {place} there are {big} seats. {pct} percent are taken, then {a} more people come. How "
    "many seats are free?",
    "{name} works {a} hours a day for {b} dollars an hour, {c} days in all, and spends {pct} "
    "percent of the money on {thing}. How much is left?",
    "Each of {a} friends brings {b} {thing} to {place}. {name} brings {c} more. {other} eats half "
    "of all. How many are there now?",
    "{name} runs {a} laps of {big} metres on Monday and {b} laps on Tuesday. How many kilometres "
    "is that?",
)
ASK_STEPS: Final = (
    "",
    "",
    "Show your work.",
    "Explain each step.",
    "Think step by step.",
    "Give the answer as a number at the end.",
    "Work it out step by step and finish with the answer on a line of its own.",
)
FOLLOW_UPS: Final = (
    "Can you make that shorter?",
    "Now explain it to a child.",
    "Give me an example.",
    "Are you sure? Check your answer.",
    "Rewrite that as a list.",
    "What did you leave out?",
    "Translate your answer into French.",
    "Say that again in a more formal way.",
    "Why?",
    "Turn your answer into a table.",
    "Which part of it matters most?",
)

LANGUAGES: Final = (
    "French", "German", "Spanish", "Italian", "Portuguese", "Dutch", "Latin", "Polish", "Swedish",
    "Turkish", "English",
)  # fmt: skip
PROGRAMMING_LANGUAGES: Final = (
    "JavaScript", "Java", "C", "C++", "Rust", "Go", "TypeScript", "Ruby", "Kotlin", "Bash", "C#",
    "Swift", "Python",
)  # fmt: skip
READERS: Final = (
    "a ten-year-old", "a beginner", "an expert", "a group of students", "my grandmother",
    "a busy manager", "new colleagues", "a sceptical friend", "the readers of a local newspaper",
)  # fmt: skip
STYLES: Final = (
    "in a formal way", "in simple words", "as a list", "in the style of a fairy tale",
    "in the past tense", "as a letter", "with humour", "in half the words", "as if for children",
    "as a poem", "like a news report", "in a friendly tone", "as a technical manual",
)  # fmt: skip
NAMES: Final = (
    "Amira", "Bruno", "Chiara", "Dmitri", "Elif", "Fatou", "Goran", "Hana", "Imre", "Jonas",
    "Keiko", "Lars", "Mei", "Nadia", "Otto", "Priya", "Quentin", "Rosa", "Samir", "Tomas", "Una",
    "Viktor", "Wanda", "Yusuf", "Zoe", "Lena", "Mark", "Sarah", "Paul", "Alice",
)  # fmt: skip
THINGS: Final = (
    "pencils", "apples", "marbles", "stamps", "oranges", "books", "cookies", "candles", "tickets",
    "postcards", "shells", "batteries", "notebooks", "tulips", "chairs", "bottles", "beads",
    "sandwiches", "coins", "plates",
)  # fmt: skip
PLACES: Final = (
    "the harbour", "the old library", "the market", "the school", "a mountain hut", "the station",
    "the museum", "a small village", "the theatre", "the park", "a lighthouse", "the bakery",
    "an abandoned factory", "the botanical garden", "a night train", "the moon",
)  # fmt: skip
TOPICS: Final = (
    "photosynthesis", "the water cycle", "black holes", "machine learning", "the French Revolution",
    "inflation", "vaccines", "plate tectonics", "the internet", "democracy", "gravity", "evolution",
    "the stock market", "renewable energy", "the Roman Empire", "antibiotics", "the human heart",
    "climate change", "recycling", "electric cars", "the solar system", "DNA", "supply and demand",
    "the printing press", "probability", "cryptography", "neural networks", "volcanoes", "sleep",
    "the immune system", "the Cold War", "jazz", "impressionism", "bread baking", "beekeeping",
    "operating systems", "databases", "the atom", "relativity", "tides", "rainbows", "lightning",
    "coral reefs", "glaciers", "migration of birds", "the periodic table", "acids and bases",
    "human memory", "language learning", "logic", "statistics", "chess openings", "the violin",
    "opera", "architecture of bridges", "the silk road", "the industrial revolution", "taxes",
    "insurance", "compound interest", "copyright", "public transport", "urban gardening", "soil",
    "earthquakes", "the ozone layer", "nuclear power", "batteries", "semiconductors", "radio waves",
    "satellites", "GPS", "encryption", "search engines", "compilers", "version control", "sorting",
    "recursion", "the scientific method", "philosophy of mind", "ethics", "stoicism", "meditation",
    "nutrition", "vitamins", "exercise", "stress", "friendship", "teamwork", "leadership",
    "time management", "public speaking", "negotiation", "marketing", "remote work",
)  # fmt: skip
COUNTRIES: Final = (
    "Japan", "Brazil", "Kenya", "Norway", "Italy", "Canada", "Egypt", "India", "Mexico", "Poland",
    "Australia", "Chile", "Greece", "Vietnam", "Morocco", "Iceland", "Peru", "Turkey", "Portugal",
    "Indonesia", "South Africa", "Austria", "Finland", "Argentina", "Thailand", "Ireland", "Cuba",
)  # fmt: skip
SUBJECTS: Final = (
    "a rainy Sunday", "the first day at school", "a lost key", "growing old", "a garden in spring",
    "moving to a new city", "a friendship", "the sea", "a broken clock", "winter", "a night market",
    "a robot that dreams", "learning to swim", "an old photograph", "space travel", "a long walk",
    "a cat", "home cooking", "a small shop", "patience", "the last bus", "a map", "silence",
    "a thunderstorm", "autumn leaves", "a forgotten song", "a bridge", "honesty", "trains",
)  # fmt: skip
PEOPLE: Final = (
    "a retired teacher", "a young doctor", "a pirate", "a bus driver", "an astronaut", "a chef",
    "a detective", "a librarian", "a farmer", "a musician", "a medieval knight", "a nurse",
    "a software engineer", "a grandmother", "a student", "a journalist", "a gardener", "a painter",
    "a mountain guide", "a physicist", "a shopkeeper", "a neighbour", "a judge", "a carpenter",
)  # fmt: skip
SLOTS: Final[dict[str, tuple[str, ...]]] = {
    "topic": TOPICS,
    "topic2": TOPICS,
    "reader": READERS,
    "style": STYLES,
    "language": LANGUAGES,
    "country": COUNTRIES,
    "country2": COUNTRIES,
    "subject": SUBJECTS,
    "person": PEOPLE,
    "person2": PEOPLE,
    "person3": PEOPLE,
    "place": PLACES,
    "code_language": PROGRAMMING_LANGUAGES,
    "invention": (
        "the telephone", "the bicycle", "paper", "the steam engine", "the microscope", "the zipper",
        "the light bulb", "the compass", "the camera", "the refrigerator", "the ballpoint pen",
        "the thermometer", "the piano", "the umbrella", "the wheel", "the telescope", "glass",
    ),
    "form": (
        "short story", "poem", "haiku", "letter", "song", "diary entry", "news article", "limerick",
        "fairy tale", "monologue", "short essay", "joke", "list of proverbs", "postcard", "fable",
    ),
    "mood": (
        "funny", "sad", "mysterious", "hopeful", "scary", "calm", "romantic", "strange", "moving",
    ),
    "matter": (
        "a delayed delivery", "a noisy neighbourhood", "a job application", "a broken window",
        "a birthday party", "a change of schedule", "homework", "a four-day week", "free museums",
        "banning cars from city centres", "a missed appointment", "a refund", "school uniforms",
    ),
    "thing": (
        "a bank account", "a bicycle", "a wooden box", "a wristwatch", "a teapot", "a letter",
        "a chess set", "a lamp", "a violin", "a backpack", "a suitcase", "a coffee machine",
        "a library", "a parking lot", "an elevator", "a shopping cart", "a deck of cards",
    ),
    "thing2": ("a mountain", "a coin", "a train", "an elephant", "a grain of rice", "a ship"),
    "thing3": ("a house", "a cloud", "a virus", "a pencil", "the sun", "a whale", "a football"),
    "goal": (
        "learning Spanish", "saving money", "running a marathon", "writing a book",
        "sleeping better",
        "finding a new job", "eating healthier", "organising a party", "reducing waste",
        "planting a garden", "redecorating a room", "preparing for an interview", "reading more",
        "making friends in a new city", "spending less time online", "starting a small business",
    ),
    "hobby": (
        "photography", "knitting", "chess", "rock climbing", "baking", "birdwatching", "drawing",
        "playing the guitar", "astronomy", "swimming", "woodworking", "hiking", "calligraphy",
        "programming", "yoga", "cycling", "pottery", "origami",
    ),
    "food": (
        "tomatoes", "lentils", "potatoes", "eggs", "chickpeas", "spinach", "pasta", "mushrooms",
    ),
    "food2": ("onions", "cheese", "carrots", "ginger", "peppers", "yoghurt", "lemon", "beans"),
    "food3": ("bread", "honey", "almonds", "cabbage", "pears", "cinnamon"),
    "task": (
        "reverses a list", "counts the vowels of a string", "checks whether a word is a palindrome",
        "finds the largest of three numbers", "sorts a dictionary by value",
        "merges two sorted lists",
        "computes the nth Fibonacci number", "removes duplicates but keeps the order",
        "converts Roman numerals to integers", "finds all divisors of a number",
        "counts how often each word occurs", "rotates a matrix by ninety degrees",
        "checks whether brackets are balanced", "computes the factorial of a number",
        "splits a list into chunks", "finds the longest common prefix", "flattens nested lists",
        "validates an e-mail address", "converts Celsius to Fahrenheit",
        "draws a triangle of stars",
        "computes the greatest common divisor", "simulates rolling two dice", "reads a CSV file",
        "finds the second smallest element", "computes a running average", "parses a date",
        "groups words by their length", "implements binary search", "implements a stack",
        "converts a number to binary", "finds pairs that add up to a target", "capitalises words",
        "generates a random password", "computes the distance of two points", "transposes a table",
        "counts lines in a text file", "implements bubble sort", "checks for leap years",
        "finds missing numbers in a range", "interleaves two strings",
        "sums the digits of a number",
    ),
    "how": (
        "read a file line by line", "sort a list of objects", "format a number with two decimals",
        "handle exceptions", "make an HTTP request", "parse JSON", "loop over a map",
        "join strings", "copy a list", "measure elapsed time", "write to a log", "use a queue",
        "generate random numbers", "compare two dates", "run code in parallel", "define a constant",
    ),
    "concept": (
        "a list", "a class", "a thread", "recursion", "inheritance", "a compiler", "a hash map",
    ),
    "concept2": (
        "a tuple", "an interface", "a process", "iteration", "composition", "an interpreter",
        "a tree",
    ),
    "pattern": (
        "a phone number", "a date like 2024-05-17", "a hexadecimal colour", "an IPv4 address",
        "a word that ends in -ing", "a floating-point number", "an HTML tag", "a time like 17:45",
    ),
    "query": (
        "customers without orders", "the three most expensive products",
        "duplicate e-mail addresses",
        "the average salary of each department", "employees hired in the last year",
        "the number of visits of each day", "books that were never borrowed",
    ),
    "shell": (
        "finds large files", "counts the lines of all Python files", "renames files to lower case",
        "shows the ten largest folders", "replaces a word in many files", "archives old logs",
    ),
    "sentence": (
        "The train to the coast leaves at half past six.", "I would like a table by the window.",
        "My brother has never seen snow.", "Where can I buy fresh bread?",
        "She forgot her umbrella.",
        "We have been waiting for an hour.", "This is the best soup I have ever eaten!",
        "Please close the door when you leave.", "The results are better than we expected.",
        "He promised to call, but he didn't.", "Could you speak more slowly?", "It rained all day.",
        "Nobody told me about the meeting.", "The children built a castle of sand.",
        "If I had known, I would have come earlier.", "Our new neighbours are very kind.",
        "The battery lasts for two days.", "I am looking forward to hearing from you.",
    ),
    "number": tuple(str(n) for n in range(2, 40)),
    "number2": tuple(str(n) for n in range(3, 60, 2)),
    "number3": tuple(str(n) for n in range(41, 400, 7)),
    "number4": tuple(str(n) for n in range(10, 100, 9)),
}  # fmt: skip

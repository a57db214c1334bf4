// "/": are we training?

import { follow } from "./live.js";

follow({ kinds: ["steps"] });

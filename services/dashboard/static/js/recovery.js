// /recovery: what would we lose right now?

import { follow } from "./live.js";

follow({ kinds: ["steps"] });

// /incidents/ID: what happened, and why was this done?

import { byId } from "./dom.js";
import { follow } from "./live.js";
import { showLogs } from "./logs.js";

const { job, generation } = byId("incident").dataset;
follow({ job });
if (job) showLogs(job, Number(generation));

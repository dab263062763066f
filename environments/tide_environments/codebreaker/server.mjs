// Serves Codebreaker: node server.mjs --port 8100

import { serve } from "./contract/serve.mjs";
import { Codebreaker } from "./game.mjs";

serve(() => new Codebreaker(), { name: "codebreaker", capacity: 256 });
